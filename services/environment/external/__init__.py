"""Programs as agents: each calls the policy through an OpenAI-compatible API.

endpoint.py         the HTTP server of a replica, with a key for each episode
calls.py            parses and checks calls of the API, and writes their answers
program_session.py  an episode's calls: each continues the conversation, or gives the policy another prompt
programs.py         runs an episode's program as a conversation of the environment
"""
