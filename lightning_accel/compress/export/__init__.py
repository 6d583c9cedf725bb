"""Files that run without this package.

``writing`` exports a module to torch programs and ONNX, and compares what they compute; ``flat`` and ``structure``
describe nested inputs and outputs by names; ``onnx`` writes ONNX. ``loading`` reads such files without pickle, after
``archive`` has checked their contents.
"""
