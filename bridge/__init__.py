"""One OpenAI-compatible endpoint in front of vLLM: it captures every sampled token and updates the weights."""
