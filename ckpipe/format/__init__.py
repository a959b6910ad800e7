"""The objects on a store as ``docs/format.md`` defines them: names, headers, manifests. Pure."""
