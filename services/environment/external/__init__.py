"""Programs that are agents already: each calls the policy as an OpenAI-compatible API.

endpoint.py    the HTTP server of a replica, with a key for each episode
calls.py       what a call may say, and how it is answered, as OpenAI's API has it
session.py     the calls of one episode: each extends the conversation, or shows the policy another prompt
programs.py    an episode's program from outside: a conversation of the environment
"""
