"""glm-accelerate: train GLM models fast, in little memory, without stalls."""
