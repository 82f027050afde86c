{{- define "wooly.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "wooly.selector" -}}
app.kubernetes.io/name: wooly
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "wooly.labels" -}}
{{ include "wooly.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{- define "wooly.image" -}}
{{- $image := .root.Values.image -}}
{{- if $image.registry }}{{ $image.registry }}/{{ end }}{{ .image }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{- define "wooly.secret" -}}
{{- .Values.existingSecret | default (printf "%s-credentials" (include "wooly.name" .)) -}}
{{- end -}}

{{- define "wooly.natsHost" -}}
{{- if .Values.nats.enabled -}}
{{ include "wooly.name" . }}-nats.{{ .Release.Namespace }}.svc:4222
{{- else -}}
{{ required "nats.externalUrl is needed where nats.enabled is false" .Values.nats.externalUrl | trimPrefix "nats://" }}
{{- end -}}
{{- end -}}

{{/* What every pod of ours may not do. */}}
{{- define "wooly.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "wooly.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "wooly.scheduling" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "wooly.placed" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Those of the installation's keys that a container needs: in a folder, and as a volume of the pod. */}}
{{- define "wooly.keysMount" -}}
{{- if .Values.keysSecret }}
- {name: keys, mountPath: /etc/wooly/keys, readOnly: true}
{{- end }}
{{- end -}}

{{- define "wooly.keysVolume" -}}
{{- with .root.Values.keysSecret }}
- name: keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      {{- range $.keys }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- end -}}

{{/* What Prometheus shows for `/metrics`, which names tenants: asked for where tenants are told apart. Of a service in capitals. */}}
{{- define "wooly.metricsEnv" -}}
{{- if .root.Values.keysSecret }}
- {name: WOOLY_{{ .service }}_METRICS_TOKEN, value: /etc/wooly/metrics/token}
{{- end }}
{{- end -}}

{{- define "wooly.metricsMount" -}}
{{- if .Values.keysSecret }}
- {name: metrics, mountPath: /etc/wooly/metrics, readOnly: true}
{{- end }}
{{- end -}}

{{- define "wooly.metricsVolume" -}}
{{- if .Values.keysSecret }}
- name: metrics
  secret:
    secretName: {{ include "wooly.secret" . }}
    defaultMode: 0440
    items: [{key: metrics-token, path: token}]
{{- end }}
{{- end -}}

{{/* NATS as services see it: with a key, or with a password that Kubernetes puts into the URL. */}}
{{- define "wooly.natsEnv" -}}
{{- $nats := .root.Values.nats }}
- {name: WOOLY_NATS_REPLICAS, value: {{ $nats.streamReplicas | default (ternary 3 1 (and $nats.enabled (ge (int $nats.replicas) 3))) | quote }}}
{{- if .root.Values.keysSecret }}
- {name: WOOLY_NATS_CREDS, value: /etc/wooly/keys/service.creds}
- {name: WOOLY_{{ .service | upper }}_NATS_URL, value: "nats://{{ include "wooly.natsHost" .root }}"}
{{- else }}
- name: NATS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "wooly.secret" .root }}, key: nats-services-password}}
- name: WOOLY_{{ .service | upper }}_NATS_URL
  value: nats://services:$(NATS_PASSWORD)@{{ include "wooly.natsHost" .root }}
{{- end }}
{{- with .root.Values.tracing.otlpEndpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if .root.Values.tracing.keep }}
- {name: WOOLY_TRACES, value: router}
{{- end }}
{{- end -}}

{{/* Probes of a service that serves /livez and /readyz on its port named health. */}}
{{- define "wooly.probes" -}}
startupProbe: {httpGet: {path: /livez, port: health}, periodSeconds: 2, failureThreshold: 60}
livenessProbe: {httpGet: {path: /livez, port: health}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
readinessProbe: {httpGet: {path: /readyz, port: health}, periodSeconds: 5, timeoutSeconds: 3}
{{- end -}}

{{/* What the operator says about REST that asks nobody for a token; the services compare it. */}}
{{- define "wooly.openToNetwork" -}}
{{- if ne .Values.openToNetwork "everyone who reaches this address is administrator" -}}
{{- fail "without keysSecret REST asks nobody for a token: set keysSecret (deploy/helm/README.md says how to make it), or openToNetwork=\"everyone who reaches this address is administrator\"" -}}
{{- end -}}
{{- .Values.openToNetwork -}}
{{- end }}
