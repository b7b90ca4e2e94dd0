"""From a Hugging Face model to the OpenVINO model that OpenVINO GenAI takes, in the cache."""
