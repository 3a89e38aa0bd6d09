"""Tools of servers that speak the Model Context Protocol (rollout.multi_turn.mcp_servers).

tool.py makes them tools of tool_agent. mcp_servers.py keeps the connections, and transports.py bounds the size
of their messages. The library `mcp` is imported only for jobs with such servers.
"""
