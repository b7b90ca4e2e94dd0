"""Requests in the forms of standard clients (OpenAI, Cohere, Jina, TEI), beside each task's own form."""
