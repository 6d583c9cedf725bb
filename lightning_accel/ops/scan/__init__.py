"""First-order linear recurrences, the core of minGRU, minLSTM and state space models.

``linear`` has the formula and its gradient, and chooses between the loop, the chunked form and the Triton kernels of
``triton``. ``gated`` computes the gates and the recurrence in one op, by the C++ kernel of ``csrc/gated_scan.cpp``
where it could be built.
"""
