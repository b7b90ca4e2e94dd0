"""Language models: prompts of tokens in, tokens out, many prompts sharing each step."""
