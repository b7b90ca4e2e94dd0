"""Speech to text with Whisper: an encoder of sound, and a decoder that writes token by token."""
