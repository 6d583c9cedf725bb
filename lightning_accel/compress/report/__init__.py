"""What compression gains: sizes, operations and latencies.

``report`` compares models layer by layer; ``macs`` counts operations; ``latency`` measures calls, interleaved;
``forms`` makes the compiled and bfloat16 forms that others are compared with; ``progress`` tells users how far long
measurements are.
"""
