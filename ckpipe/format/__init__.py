"""What lies on a store, as ``docs/format.md`` says it: names, headers and manifests. Pure."""
