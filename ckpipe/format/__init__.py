"""The objects on a store as ``docs/format.md`` fixes them: names, headers and manifests. Pure."""
