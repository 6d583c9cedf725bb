"""What compression gains and loses: sizes, operations, latencies, perplexities.

``report`` compares forms, and models layer by layer; ``frontier`` draws forms by quality and latency; ``perplexity``
measures language models; ``macs`` counts operations; ``latency`` measures calls, interleaved; ``forms`` makes the
compiled and bfloat16 forms that others are compared with; ``progress`` tells users how far long measurements are.
"""
