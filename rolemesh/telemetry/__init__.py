"""What a process tells about itself: logs, Prometheus metrics, timelines, and the context that labels them."""
