"""The environment role: the other side of conversations.

worker.py      keeps the episodes of a replica; episode.py is one of them
timeouts.py    runs the code of environments, for a bounded time
agents/        answer the policy's turns
tools/         the tools that tool_agent runs; mcp_tools/ those of MCP servers
interactions/  answer as users, for tool_agent
external/      the API by which programs call the policy
"""
