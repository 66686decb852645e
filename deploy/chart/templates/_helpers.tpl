{{/* Labels of a role's objects: include "pawl.labels" (list . "proxy"). */}}
{{- define "pawl.labels" -}}
{{ include "pawl.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- define "pawl.selector" -}}
app.kubernetes.io/name: pawl
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* A role's values, as JSON. The migration has those of the proxy, whose settings it checks, but for its own. */}}
{{- define "pawl.values" -}}
{{- $values := (index . 0).Values }}
{{- $own := index $values (index . 1) | default dict }}
{{- if has (index . 1) (list "migrate" "test") }}
{{- $own = merge (dict) $own (pick $values.controller "resources" "pod") }}
{{- end }}
{{- if eq (index . 1) "migrate" }}
{{- $own = merge $own (pick $values.proxy "env" "envFrom" "volumes" "volumeMounts") }}
{{- end }}
{{- toJson $own }}
{{- end }}

{{/* Names of the settings that a role reads, as JSON. */}}
{{- define "pawl.reads" -}}
{{- $roles := (index . 0).Files.Get "files/settings.json" | fromJson }}
{{- index $roles (index . 1) | default list | toJson }}
{{- end }}

{{/* The files of `config` that a role may read, as JSON: all but those that only settings of others name. */}}
{{- define "pawl.files" -}}
{{- $root := index . 0 }}
{{- $reads := include "pawl.reads" . | fromJsonArray }}
{{- $files := dict }}
{{- $settings := include "pawl.settings" . | fromJson }}
{{- range $file, $text := include "pawl.config" $root | fromJson }}
{{- $is_named := false }}
{{- $is_read := false }}
{{- range $name, $value := $settings }}
{{- if eq $value (printf "config/%s" $file) }}
{{- $is_named = true }}
{{- $is_read = or $is_read (has $name $reads) }}
{{- end }}
{{- end }}
{{- if and $reads (or $is_read (not $is_named)) }}
{{- $_ := set $files $file $text }}
{{- end }}
{{- end }}
{{- toJson $files }}
{{- end }}

{{/* A pod's metadata: a change starts the pod anew, so nothing is here that it does not read. */}}
{{- define "pawl.podMetadata" -}}
{{- $values := include "pawl.values" . | fromJson }}
{{- $annotations := dict }}
{{- with include "pawl.files" . | fromJson }}
{{- $_ := set $annotations "checksum/config" (toJson . | sha256sum) }}
{{- end }}
metadata:
  labels: {{- include "pawl.selector" . | fromYaml | mergeOverwrite (dict) ($values.podLabels | default dict) | toYaml | nindent 4 }}
  {{- with mergeOverwrite $annotations ($values.podAnnotations | default dict) }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* What all pods have: include "pawl.pod" (list . "proxy"). */}}
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
{{- with (include "pawl.values" . | fromJson).pod }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What all containers have: include "pawl.container" (list . "proxy" (dict "PAWL_LISTEN" "0.0.0.0:8100")),
with variables of its own. */}}
{{- define "pawl.container" -}}
{{- $values := include "pawl.values" . | fromJson -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- $own := include "pawl.env" . }}
{{- if or $own $values.env }}
env:
  {{- $own | nindent 2 }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with $values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.resources | default (index . 0).Values.controller.resources }}
resources: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A setting's value; without this 1000000 would be 1e+06. */}}
{{- define "pawl.text" -}}
{{ if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{/* Where the chart's vLLM fetches versions from, if it does. */}}
{{- define "pawl.source" -}}
{{- with .Values.settings.PAWL_ADAPTER_SOURCE }}
{{- if regexMatch "^(s3a?|gc?s|az|abfss?|adl)://" . }}
{{- fail (printf "settings.PAWL_ADAPTER_SOURCE is %s, and no image of Pawl has the package that reads it (s3fs, gcsfs or adlfs): remove it, and the trainer serves versions itself" .) }}
{{- end }}
{{- end }}
{{- if not .Values.adapters.existingClaim }}
{{- $trainer := printf "http://%s-trainer:8102/adapters" .Release.Name }}
{{- .Values.settings.PAWL_ADAPTER_SOURCE | default (ternary $trainer "" .Values.trainer.enabled) }}
{{- end }}
{{- end }}

{{/* The files of `config`, as JSON, with the proxies' own of several vLLM servers. */}}
{{- define "pawl.config" -}}
{{- $config := dict }}
{{- if eq (get (include "pawl.settings" (list . "proxy") | fromJson) "PAWL_UPSTREAMS") "config/vllm.toml" }}
{{- $urls := include "pawl.servers" (list . 8000) }}
{{- $_ := set $config "vllm.toml" (printf "[[upstream]]\nname = \"vllm\"\ndefault = true\nurls = %s\n" $urls) }}
{{- end }}
{{- merge (dict) .Values.config $config | toJson }}
{{- end }}

{{/* A port of each of the chart's vLLM servers, as JSON: include "pawl.servers" (list . 8000). */}}
{{- define "pawl.servers" -}}
{{- $release := (index . 0).Release.Name }}
{{- $urls := list }}
{{- range $number := until (int (index . 0).Values.vllm.replicas) }}
{{- $urls = append $urls (printf "http://%s-vllm-%d.%s-vllm-pods:%d/v1" $release $number $release (index $ 1)) }}
{{- end }}
{{- toJson $urls }}
{{- end }}

{{/* All settings, as a role sees them, as JSON: texts by name. Others than proxies load adapters. */}}
{{- define "pawl.settings" -}}
{{- $root := index . 0 }}
{{- $role := index . 1 }}
{{- $values := $root.Values }}
{{- $settings := dict }}
{{- $source := include "pawl.source" $root }}
{{- with $source }}
{{- $_ := set $settings "PAWL_ADAPTER_SOURCE" . }}
{{- end }}
{{- $loads := not (has $role (list "proxy" "adapters")) }}
{{- $servers := list }}
{{- if $values.vllm.enabled }}
{{- $servers = include "pawl.servers" (list $root (ternary 8104 8000 (not (empty (and $loads $source))))) | fromJsonArray }}
{{- if gt (len $servers) 1 }}
{{- $_ := set $settings "PAWL_UPSTREAMS" "config/vllm.toml" }}
{{- end }}
{{- else if and $loads (not $values.adapters.existingClaim) }}
{{- $servers = $values.adapters.servers }}
{{- end }}
{{- $settings = mergeOverwrite $settings $values.settings }}
{{- with $servers }}
{{- $_ := set $settings "PAWL_UPSTREAM_URL" (first .) }}
{{- if $loads }}
{{- $_ := set $settings "PAWL_REPLICA_URLS" (rest . | join ",") }}
{{- end }}
{{- end }}
{{- if and $values.vllm.enabled $values.settings.PAWL_POLICIES }}
{{- /* PAWL_POLICY is what vLLM serves, and trained are all of the file. */}}
{{- $_ := set $settings "PAWL_POLICY" "" }}
{{- end }}
{{- $texts := dict }}
{{- range $name, $value := $settings }}
{{- $_ := set $texts $name (include "pawl.text" $value) }}
{{- end }}
{{- toJson $texts }}
{{- end }}

{{/* A container's variables: the settings that its role reads (the migration checks all), addresses for
commands that are typed there, and its own. */}}
{{- define "pawl.env" -}}
{{- $root := index . 0 }}
{{- $role := index . 1 }}
{{- $release := $root.Release.Name }}
{{- $reads := include "pawl.reads" . | fromJsonArray }}
{{- $env := dict }}
{{- if and (ne $role "adapters") (or $reads (eq $role "migrate")) }}
{{- $_ := set $env "PAWL_SECRETS_DIR" "/etc/pawl/secrets" }}
{{- range $at, $port := dict "LISTEN" "proxy:8100" "ADMIN_LISTEN" "proxy-admin:8101" "TRAINER_LISTEN" "trainer:8102" "CONTROLLER_LISTEN" "controller:8103" }}
{{- $_ := set $env (printf "PAWL_%s" $at) (printf "%s-%s" $release $port) }}
{{- end }}
{{- end }}
{{- range $name, $value := include "pawl.settings" . | fromJson }}
{{- if or (has $name $reads) (eq $role "migrate") }}
{{- $_ := set $env $name $value }}
{{- end }}
{{- end }}
{{- if $reads }}
{{- $hosts := list (printf "%s-%s.%s" $release (ternary "vllm" $role (eq $role "adapters")) $root.Release.Namespace) ".localhost" ".svc" ".svc.cluster.local" }}
{{- if eq $role "adapters" }}
{{- $hosts = append $hosts (printf ".%s-vllm-pods" $release) }}
{{- end }}
{{- with (index $root.Values $role).ingress }}
{{- if .enabled }}
{{- $hosts = append $hosts .host }}
{{- end }}
{{- end }}
{{- with $root.Values.settings.PAWL_ALLOWED_HOSTS }}
{{- $hosts = append $hosts . }}
{{- end }}
{{- $_ := set $env "PAWL_ALLOWED_HOSTS" (join "," $hosts) }}
{{- end }}
{{- range $name, $value := mergeOverwrite $env (index . 2) }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* A pod's volumes, and where a container has them: include "pawl.volumes" (list . "proxy"). */}}
{{- define "pawl.volumes" -}}
{{- $values := (index . 0).Values }}
{{- $release := (index . 0).Release.Name }}
{{- $migrates := eq (index . 1) "migrate" -}}
{{- if ne (index . 1) "vllm" -}}
- name: secrets
  projected:
    sources:
      - secret:
          name: {{ $values.database.secret }}
          items: [{key: {{ $values.database.key }}, path: DATABASE_URL}]
      {{- range $values.secrets }}
      - secret: {name: {{ . }}}
      {{- end }}
      {{- if not $migrates }}
      # For commands that are typed there: settings that the pod's own process does not read.
      - configMap: {name: {{ $release }}-settings}
      {{- end }}
- name: config
  configMap: {name: {{ $release }}-{{ ternary "migrate" "config" $migrates }}}
{{ end -}}
- {name: tmp, emptyDir: {}}
{{- with (include "pawl.values" . | fromJson).volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "pawl.mounts" -}}
{{- if not (has (index . 1) (list "vllm" "adapters")) -}}
- {name: secrets, mountPath: /etc/pawl/secrets, readOnly: true}
- {name: config, mountPath: /var/lib/pawl/config, readOnly: true}
{{ end -}}
- {name: tmp, mountPath: /tmp}
{{- with (include "pawl.values" . | fromJson).volumeMounts }}
{{ toYaml . }}
{{- end }}
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

{{/* A Service of a role inside the cluster, for pods that are not ready, too: include "pawl.service"
(list . "controller" "controller" 8103 "metrics"), with its name, its role, its port and the pod's. */}}
{{- define "pawl.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ (index . 0).Release.Name }}-{{ index . 1 }}
  labels: {{- include "pawl.labels" (list (index . 0) (index . 2)) | nindent 4 }}
spec:
  selector: {{- include "pawl.selector" (list (index . 0) (index . 2)) | nindent 4 }}
  ports: [{name: http, port: {{ index . 3 }}, targetPort: {{ index . 4 }}}]
  publishNotReadyAddresses: true
{{- end }}

{{/* Drained nodes stop one of a role's pods at a time: include "pawl.budget" (list . "proxy"). */}}
{{- define "pawl.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ (index . 0).Release.Name }}-{{ index . 1 }}
  labels: {{- include "pawl.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  # A node must not wait for a pod that serves nobody.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "pawl.selector" . | nindent 6 }}
{{- end }}

{{/* An Ingress to a role's Service, if its values want one: include "pawl.ingress" (list . "proxy" 8100). */}}
{{- define "pawl.ingress" -}}
{{- $name := printf "%s-%s" (index . 0).Release.Name (index . 1) }}
{{- with (index (index . 0).Values (index . 1)).ingress }}
{{- if .enabled -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ $name }}
  labels: {{- include "pawl.labels" $ | nindent 4 }}
  annotations: {{- toYaml .annotations | nindent 4 }}
spec:
  {{- with .className }}
  ingressClassName: {{ . }}
  {{- end }}
  rules:
    - host: {{ .host }}
      http:
        paths: [{path: /, pathType: Prefix, backend: {service: {name: {{ $name }}, port: {number: {{ index $ 2 }}}}}}]
  {{- if .tlsSecret }}
  tls: [{hosts: [{{ .host }}], secretName: {{ .tlsSecret }}}]
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A size of a claim in bytes: Kubernetes shows 1.5Gi as 1536Mi. */}}
{{- define "pawl.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 }}
{{- $unit := regexFind "[A-Za-z]*$" . }}
{{- mulf (trimSuffix $unit . | float64) (get $units $unit) }}
{{- end }}
