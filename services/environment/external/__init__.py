"""Programs that are agents already: each calls the policy as an OpenAI-compatible API.

endpoint.py    the HTTP server of a replica, with a key for each episode
calls.py       parses and checks calls, and writes their answers, as OpenAI's API has them
session.py     the calls of one episode: each extends the conversation, or shows the policy another prompt
programs.py    runs an episode's program as a conversation of the environment
"""
