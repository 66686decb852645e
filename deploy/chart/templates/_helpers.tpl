{{/* Labels of a role's objects: include "pawl.labels" (list . "proxy"). */}}
{{- define "pawl.labels" -}}
{{ include "pawl.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- define "pawl.selector" -}}
app.kubernetes.io/name: pawl
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* A pod's metadata; a change of config starts pods anew. */}}
{{- define "pawl.podMetadata" -}}
metadata:
  labels: {{- include "pawl.labels" . | nindent 4 }}
  annotations:
    checksum/config: {{ (index . 0).Values.config | toJson | sha256sum }}
{{- end }}

{{/* What all pods have: include "pawl.pod" (list . .Values.proxy.pod). */}}
{{- define "pawl.pod" -}}
{{- $values := (index . 0).Values -}}
automountServiceAccountToken: false
# A Service's variables, such as PAWL_PROXY_PORT, would be taken for settings and refused.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with $values.user }}
  runAsUser: {{ int64 . }}
  runAsGroup: 0
  fsGroup: 0
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with $values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with index . 1 }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "pawl.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A setting's value; without this 1000000 would be 1e+06. */}}
{{- define "pawl.text" -}}
{{ if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{/* Where the chart's vLLM fetches versions from, if it does. */}}
{{- define "pawl.source" -}}
{{- if not .Values.adapters.existingClaim }}
{{- $trainer := printf "http://%s-trainer:8102/adapters" .Release.Name }}
{{- .Values.settings.PAWL_ADAPTER_SOURCE | default (ternary $trainer "" .Values.trainer.enabled) }}
{{- end }}
{{- end }}

{{/* The settings of a role: include "pawl.env" (list . "proxy" (dict "PAWL_LISTEN" "0.0.0.0:8100")). */}}
{{- define "pawl.env" -}}
{{- $root := index . 0 }}
{{- $role := index . 1 }}
{{- $release := $root.Release.Name }}
{{- $values := $root.Values }}
{{- $names := printf "%[1]s-proxy.%[2]s,%[1]s-trainer.%[2]s,.localhost,.svc,.svc.cluster.local" $release $root.Release.Namespace }}
{{- $env := dict "PAWL_ALLOWED_HOSTS" $names }}
{{- if ne $role "adapters" }}
{{- $_ := set $env "PAWL_SECRETS_DIR" "/etc/pawl/secrets" }}
{{- end }}
{{- if $values.vllm.enabled }}
{{- $_ := set $env "PAWL_UPSTREAM_URL" (printf "http://%s-vllm:8000/v1" $release) }}
{{- end }}
{{- $source := include "pawl.source" $root }}
{{- with $source }}
{{- $_ := set $env "PAWL_ADAPTER_SOURCE" . }}
{{- end }}
{{- $env = mergeOverwrite $env $values.settings }}
{{- if and (has $role (list "trainer" "controller")) (not $values.adapters.existingClaim) }}
{{- $fetching := and $source (list (printf "http://%s-vllm:8104/v1" $release)) }}
{{- with ternary $fetching $values.adapters.servers $values.vllm.enabled }}
{{- $_ := set $env "PAWL_UPSTREAM_URL" (first .) }}
{{- $_ := set $env "PAWL_REPLICA_URLS" (rest . | join ",") }}
{{- end }}
{{- end }}
{{- if and (eq $role "trainer") $values.vllm.enabled $values.settings.PAWL_POLICIES }}
# PAWL_POLICY is what vLLM serves, and trained are all of the file.
{{- $_ := set $env "PAWL_POLICY" "" }}
{{- end }}
{{- range $name, $value := mergeOverwrite $env (index . 2) }}
- {name: {{ $name }}, value: {{ include "pawl.text" $value | quote }}}
{{- end }}
{{- end }}

{{/* Volumes of Pawl's own containers, and where they are mounted. */}}
{{- define "pawl.volumes" -}}
- name: secrets
  projected:
    sources:
      - secret:
          name: {{ .Values.database.secret }}
          items: [{key: {{ .Values.database.key }}, path: DATABASE_URL}]
      {{- range .Values.secrets }}
      - secret: {name: {{ . }}}
      {{- end }}
# Optional, as the migration runs before it is made.
- name: config
  configMap: {name: {{ .Release.Name }}-config, optional: true}
- {name: tmp, emptyDir: {}}
{{- end }}

{{- define "pawl.mounts" -}}
- {name: secrets, mountPath: /etc/pawl/secrets, readOnly: true}
- {name: config, mountPath: /var/lib/pawl/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "pawl.adapters" -}}
- name: adapters
  {{- if .Values.adapters.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.adapters.existingClaim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{/* Downloaded models, and what compilers leave behind. */}}
{{- define "pawl.models" -}}
- name: models
  {{- if .Values.models.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
- {name: home, emptyDir: {}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: 2Gi}}
{{- end }}
