"""Files that run without this package.

``writing`` writes a module as torch programs and ONNX files, which ``traced`` makes of its calls, and ``verification``
compares what they compute; ``flat`` and ``structure`` describe nested inputs and outputs by names; ``onnx`` adds what
comes before and after a model and translates operators. ``decoding`` makes the cache of a language model an argument.
``loading`` reads such files without pickle, after ``archive`` has checked their contents.
"""
