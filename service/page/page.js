// Addresses are relative, so that the page works behind a proxy that serves it under a prefix.
AsyncApiStandalone.render(
  {
    schema: { url: new URL("asyncapi.yaml", document.baseURI).href },
    config: { show: { sidebar: true, errors: true }, expand: { messageExamples: true } },
  },
  document.getElementById("asyncapi"),
);
