"""Model archives: built with torch-model-archiver and filled with compiled graphs; checked and inspected."""
