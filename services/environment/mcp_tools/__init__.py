"""Tools of servers that speak the Model Context Protocol (rollout.multi_turn.mcp_servers).

tool.py makes tools of tool_agent of them. servers.py keeps the connections, and transports.py bounds what is
read from them. The library `mcp` is imported for jobs with servers alone.
"""
