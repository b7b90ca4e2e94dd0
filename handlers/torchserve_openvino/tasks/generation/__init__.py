"""Text generation: requests in, text out as it is generated."""
