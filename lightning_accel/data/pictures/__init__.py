"""Small images: scikit-learn's ``digits``, generated ``bars`` and stripes, and files in the ``idx`` format of MNIST."""
