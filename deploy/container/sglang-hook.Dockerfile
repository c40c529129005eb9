# An SGLang image with the hook. It adds our wheel and nothing else: what the hook needs, SGLang has.
# Without DP_SIDECAR_ENDPOINT in the environment the hook does nothing.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}
RUN --mount=type=bind,source=dist,target=/dist python3 -m pip install --no-cache-dir --no-deps --no-index /dist/sglang_dp_sidecar-*.whl && python3 -c "import sidecar.cli, sglang_hook.client, sglang_hook.reporter"
