{{- /* What the operator does in the namespaces that it watches: rules of a ClusterRole, or of a Role in each of them.
       The owner of an object is read (get) before the object is written. Applying (server-side) needs patch. */ -}}
{{- define "operator.rules" -}}
- apiGroups: [dsv4.dev]
  resources: [dsv4deployments]
  verbs: [get, list, watch]
- apiGroups: [dsv4.dev]
  resources: [dsv4deployments/status]
  verbs: [update]
- apiGroups: [dsv4.dev]
  resources: [dsv4deployments/finalizers] # for owner references that hold the owner's deletion up
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods/eviction] # of a gateway that moves to another node
  verbs: [create]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets] # by name; never listed
  verbs: [get, create, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
{{- if has "KubeRay" .Values.policy.backends }}
- apiGroups: [ray.io]
  resources: [rayclusters] # one for each incarnation; ended before its pods (patch)
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods] # the finalizer that keeps KubeRay from replacing an ended pod
  verbs: [patch]
{{- end }}
{{- if has "Volcano" .Values.policy.schedulers }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, create, delete]
{{- end }}
{{- if has "Coscheduling" .Values.policy.schedulers }}
- apiGroups: [scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, list, create, delete]
{{- end }}
{{- if has "Kueue" .Values.policy.schedulers }}
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues, workloads] # the queue of spec.topology.scheduler, and why a group waits in it
  verbs: [get]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [get, create, patch]
{{- end -}}
