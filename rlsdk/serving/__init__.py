"""Serve the policy to agents and people as an OpenAI-compatible server."""
