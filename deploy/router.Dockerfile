# SGLang's model gateway. docs/fleet.md says why this one, and what its options do.
FROM python:3.12-slim
RUN python3 -m pip install --no-cache-dir smg==1.13.0
EXPOSE 30080 29000
ENTRYPOINT ["smg", "launch"]
