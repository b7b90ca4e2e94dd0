"""Speech recognition by models that write text token by token (Whisper)."""
