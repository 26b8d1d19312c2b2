"""ONNX graphs of the parts: the target's body, the LM head."""
