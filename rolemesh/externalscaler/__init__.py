"""Generated from proto/externalscaler/: what KEDA asks a controller."""
