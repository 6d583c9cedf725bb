"""What happens with a trained model: quantized, exported, reported.

``quantization``, ``export`` and ``report`` each work on one of the ``copies`` of the model, gathered from all
processes, so that training is not changed; all run their checks before training starts.
"""
