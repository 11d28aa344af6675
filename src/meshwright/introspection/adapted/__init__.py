"""Put adapters beside a model's linear layers, by the library peft, and tell the base's weights from the adapters'."""
