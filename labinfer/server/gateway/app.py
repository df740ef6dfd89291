"""ASGI application: routes requests to handlers, and makes an error object, in the format of the requested API, of every
failure."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Match, Route

from labinfer.base.errors import is_failure
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError
from labinfer.server.gateway.batch_runner import BatchRunner
from labinfer.server.gateway.endpoint import Endpoint
from labinfer.server.gateway.endpoints import API, PAGES
from labinfer.server.gateway.error_form import ANTHROPIC_ERRORS, OPENAI_ERRORS, VERSION_HEADER, ErrorForm
from labinfer.server.gateway.host_check import AllowedHosts, HostCheck
from labinfer.server.gateway.http_context import ID_HEADER, WARNING_HEADER, HttpContext
from labinfer.server.gateway.routes import batches
from labinfer.server.gateway.service import Service

logger = logging.getLogger(__name__)


def make_app(service: Service) -> Starlette:
    """Make the ASGI application of ``service``. The application's attribute ``state.batches`` is the ``BatchRunner``, if the server
    stores files."""
    routes, endpoints = [], {}
    for endpoint in (*API, *PAGES):
        for path in (endpoint.path, *endpoint.aliases):
            routes.append(Route(path, _guard(service, endpoint), methods=[endpoint.method]))
            endpoints[path] = endpoint

    def refuse(http: Request, error: ApiError) -> HttpResponse:
        endpoint = endpoints.get(_matching_path(http, routes))
        context = HttpContext(service, http, endpoint.path if endpoint else "", _error_form(http, endpoint))
        return _answer_error(context, error, logged=True)

    async def on_http_exception(http: Request, error: Exception) -> HttpResponse:
        return refuse(http, _routing_error(http, error, routes))

    options = service.options
    hosts = AllowedHosts(options.allowed_hosts, options.host, options.allowed_origins)
    middleware = [Middleware(HostCheck, hosts=hosts, refuse=refuse)]
    if options.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[origin.lower() for origin in options.allowed_origins],
                allow_methods=sorted({endpoint.method for endpoint in API}),
                allow_headers=("*",),
                expose_headers=(ID_HEADER, WARNING_HEADER, "retry-after"),
            )
        )
    app = Starlette(routes=routes, exception_handlers={HTTPException: on_http_exception}, middleware=middleware)
    if service.files is not None:
        app.state.batches = BatchRunner(service, service.files, batches.HANDLERS)
    app.router.redirect_slashes = False  # paths with and without a trailing slash differ
    return app


def _guard(service: Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[HttpResponse]]:
    needs_key = endpoint.with_options(service.options, service.keys.required).needs_key

    async def run(http: Request) -> HttpResponse:
        context = HttpContext(
            service, http, endpoint.path, _error_form(http, endpoint), frozenset(dict(endpoint.query))
        )
        try:
            if needs_key:
                context.caller = service.keys.authenticate(
                    http.headers.get("authorization"), http.headers.get("x-api-key")
                )
            response = await endpoint.handler(context)
        except ApiError as error:
            return _answer_error(context, error, endpoint.logged)
        except ClientDisconnect:
            return _answer_error(context, api_errors.cancelled(), endpoint.logged)
        except BaseException as error:  # a failure must not affect other requests
            if not is_failure(error):
                raise
            logger.error("request %s failed\n%s", context.id, traceback.format_exc().rstrip())
            return _answer_error(context, api_errors.internal(context.id), logged=True)
        if isinstance(response, HttpResponse):  # an EventStream ends the context itself
            context.end(response.status_code, endpoint.logged)
        return response

    return run


def _error_form(http: Request, endpoint: Endpoint | None) -> ErrorForm:
    """Error format (OpenAI's or Anthropic's) for the request ``http`` to ``endpoint``; None if no endpoint serves its
    path."""
    if (endpoint is None or endpoint.is_anthropics_too) and VERSION_HEADER in http.headers:
        return ANTHROPIC_ERRORS
    return endpoint.error_form if endpoint else OPENAI_ERRORS


def _answer_error(context: HttpContext, error: ApiError, logged: bool) -> HttpResponse:
    context.end(error.status, logged)
    return context.json(context.error_form.make(error, context.id), error.status, error.headers)


def _routing_error(http: Request, error: HTTPException, routes: list[Route]) -> ApiError:
    path = http.scope["path"]  # not ``http.url``, which has the client's Host header
    if error.status_code == 405:
        first = _matching_path(http, routes)
        allowed = [method for route in routes if route.path == first for method in sorted(route.methods or ())]
        return api_errors.method_not_allowed(http.method, path, allowed)
    if error.status_code == 404:
        return api_errors.not_found_route(http.method, path)
    return ApiError(error.status_code, str(error.detail), api_errors.INVALID_REQUEST)


def _matching_path(http: Request, routes: list[Route]) -> str | None:
    """Path pattern of the first route that matches the request's path, whatever its method; None if no route matches."""
    return next((route.path for route in routes if route.matches(http.scope)[0] is not Match.NONE), None)
