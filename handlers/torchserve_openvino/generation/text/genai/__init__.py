"""The engine `genai`: OpenVINO GenAI, which lets many prompts share each step."""
