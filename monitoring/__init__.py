"""Generates the Grafana dashboards, and draws them as pictures from a Prometheus."""
