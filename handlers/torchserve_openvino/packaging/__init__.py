"""Model archives: made by torch-model-archiver, with the compiled graphs inside, and looked into."""
