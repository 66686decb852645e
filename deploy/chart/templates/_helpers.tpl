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

{{- define "pawl.env" -}}
- {name: PAWL_SECRETS_DIR, value: /etc/pawl/secrets}
{{- if .Values.vllm.enabled }}
- {name: PAWL_UPSTREAM_URL, value: "http://{{ .Release.Name }}-vllm:8000/v1"}
{{- end }}
{{- range $name, $value := .Values.settings }}
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
  persistentVolumeClaim: {claimName: {{ .Values.adapters.existingClaim | default (printf "%s-adapters" .Release.Name) }}}
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
