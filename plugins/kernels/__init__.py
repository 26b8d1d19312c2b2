"""Kernels in the Triton language, and the operations of `trtspec.plugins.definition` on them.

Only the modules with kernels in them import triton; `launch` imports them at the first call.
"""
