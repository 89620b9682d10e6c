"""Who gets the lines of metrics.jsonl too: TensorBoard, Weights & Biases, MLflow, Prometheus."""
