"""The cluster's side: the kubelet's device plugin API, HAMi's scheduler, the Kubernetes API, and what pods leave."""
