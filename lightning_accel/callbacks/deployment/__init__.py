"""What happens with a trained model: quantized, exported, reported.

``quantization``, ``export`` and ``report`` each work on one of the ``copies`` of the model, gathered from all
processes; other callbacks copy by them, too. ``deployed`` finds the part of a copy that validation calls, and judges
what stands in for it. ``loaders`` read the run's data beside it, and ``memory`` runs a form in a process of its own.
``integer_training``, for which a model is trained, changes its layers during the fit; all else leaves the training as
it is. All run their checks before training starts.
"""
