#!/bin/sh
# Prints a PrometheusRule for each rule file of deploy/prometheus that is named. kustomize reads no
# files from outside its folder, so the result is kept in overlays/monitoring/prometheusrule.yaml.
set -eu
for file; do
  name=$(basename "$file")
  cat <<END
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: sglang-dp-sidecar-${name%%.*}
  labels:
    app.kubernetes.io/part-of: sglang-dp-sidecar
spec:
END
  sed 's/^\(.\)/  \1/' "$file"
done
