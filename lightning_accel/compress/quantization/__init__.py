"""int8 and lower: quantized forms of a model, measured, and the best of them picked.

``quantized`` makes the forms of a model, as ``trial`` lists and judges them, and picks one by ``picking``. ``layers``
selects what is quantized, ``inputs`` finds the dynamic sizes of calls. ``pt2e`` and ``onnx`` make forms with torch and
with ONNX Runtime, and ``onnx_blockwise`` those with the integers of ``blockwise``, which ``onnx_products`` puts into
graphs; ``form`` is the interface of all. ``fake_quant`` trains with quantization. ``decoding`` picks among the forms of
decoders of text.
"""
