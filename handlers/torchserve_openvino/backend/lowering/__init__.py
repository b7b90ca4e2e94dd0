"""What is put right in a lowered graph before it is converted."""
