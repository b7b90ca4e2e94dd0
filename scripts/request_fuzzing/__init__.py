"""Structure-aware fuzzing of requests: valid ones beside hostile ones, on a real server."""
