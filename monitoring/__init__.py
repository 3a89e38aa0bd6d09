"""What people see of a run: Grafana's dashboards, made from code, and Prometheus beside a local run."""
