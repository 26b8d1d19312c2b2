"""Requests and answers of Triton Inference Server, and the thread that works on them."""
