"""Operators, each with its definition beside its fast forms.

No model here needs gelu, softmax and layer_norm yet: they are the operators of ChatGLM-6B and GLM-130B.
"""
