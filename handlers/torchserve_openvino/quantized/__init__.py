"""Linear layers whose weights come in few bits: read, dequantized, or built of OpenVINO's operations."""
