"""Translate the errors of an S3 store and of its client.

The codes of errors are those of "Error responses" in the Amazon S3 API reference. Compatible stores
use the same codes; if one does not, the status is enough.
"""

from __future__ import annotations

import botocore.exceptions as client_errors

from ckpipe.errors import (
    InvalidKey,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    Throttled,
)
from ckpipe_http.failures import (
    BUCKET,
    NETWORK,
    SHARED,
    TLS,
    UNREACHED,
    Meaning,
    Refused,
    Table,
    retry_after,
)
from ckpipe_s3.access import KEYS

_RIGHTS = "Give these credentials the rights that docs/tutorials/s3.md lists"
_SIGNED = (
    f"{KEYS}. Some stores answer like this to checksums that they do not know; for these set the "
    "option 'checksum' to 'md5' or 'none'"
)
UNKNOWN_CHECKSUM = (
    "If the store does not know this checksum, set the option 'checksum' to 'md5' or 'none'"
)
_CLOCK = "Set this machine's clock"
_REGION = "Set the option 'region' to the bucket's region, or 'endpoint_url' for another store"
_LIFECYCLE = "Look for a lifecycle rule or a clean-up that removes uploads"
_RENEW = "Renew the credentials; a program that runs cannot get others from environment variables"

_NO_CREDENTIALS = (
    client_errors.NoCredentialsError,
    client_errors.PartialCredentialsError,
    client_errors.NoAuthTokenError,
    client_errors.TokenRetrievalError,
    client_errors.UnauthorizedSSOTokenError,
    client_errors.SSOTokenLoadError,
)
_BROKEN = (
    client_errors.HTTPClientError,
    client_errors.ConnectionError,
    client_errors.FlexibleChecksumError,
)
_PASSING = (
    "ConditionalRequestConflict",
    "OperationAborted",
    "InternalError",
    "RequestTimeout",
    "IncompleteBody",
    409,
)
_THROTTLING = (
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "Throttling",
    "ThrottlingException",
    "RequestThrottled",
    "RequestLimitExceeded",
    "TooManyRequests",
)
_BAD_KEYS = ("InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", 401)
_OLD_KEYS = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_ELSEWHERE = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    301,
    307,
)

ERRORS: Table = {
    **SHARED,
    **dict.fromkeys(_NO_CREDENTIALS, Meaning(PermissionDenied, KEYS, "no credentials ({name})")),
    # Credentials that were found when the backend was opened are renewed by requests.
    client_errors.CredentialRetrievalError: Meaning(
        StoreUnavailable, KEYS, "the credentials could not be renewed ({name})"
    ),
    client_errors.SSLError: TLS,
    client_errors.ProxyConnectionError: Meaning(
        StoreUnavailable, None, "the proxy cannot be reached"
    ),
    client_errors.EndpointConnectionError: Meaning(
        StoreUnavailable, UNREACHED, "the connection failed or broke off"
    ),
    **dict.fromkeys(_BROKEN, Meaning(StoreUnavailable)),
    client_errors.BotoCoreError: Meaning(StoreError, None, "{name}"),
    "NoSuchKey": Meaning(ObjectNotFound),
    "NoSuchBucket": Meaning(StoreError, BUCKET),
    "NoSuchAccessPoint": Meaning(StoreError, "Check the alias of the access point in the URL"),
    "NoSuchUpload": Meaning(StoreError, _LIFECYCLE),
    "PreconditionFailed": Meaning(ObjectExists),
    **dict.fromkeys(_PASSING, Meaning(StoreUnavailable)),
    **dict.fromkeys(_THROTTLING, Meaning(Throttled)),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", 403), Meaning(PermissionDenied, _RIGHTS)),
    **dict.fromkeys(_BAD_KEYS, Meaning(PermissionDenied, KEYS)),
    "SignatureDoesNotMatch": Meaning(PermissionDenied, _SIGNED),
    **dict.fromkeys(_OLD_KEYS, Meaning(PermissionDenied, _RENEW)),
    # The clock of a machine that was suspended is set within seconds.
    "RequestTimeTooSkewed": Meaning(StoreUnavailable, _CLOCK),
    # The network damaged the bytes; sending them again helps.
    "BadDigest": Meaning(StoreUnavailable, NETWORK),
    "XAmzContentChecksumMismatch": Meaning(StoreUnavailable, NETWORK),
    "XAmzContentSHA256Mismatch": Meaning(StoreUnavailable, NETWORK),
    "InvalidPart": Meaning(StoreError, "Save again"),
    "QuotaExceeded": Meaning(StoreFull, "Free space within the bucket's quota"),
    **dict.fromkeys(("XMinioStorageFull", 507), Meaning(StoreFull, "Free space on the store")),
    "KeyTooLongError": Meaning(InvalidKey, "Use a shorter prefix"),
    **dict.fromkeys(_ELSEWHERE, Meaning(StoreError, _REGION)),
}


def refusal(error: BaseException | None) -> Refused | None:
    """Return the store's answer in an error of the client; None if it has none."""
    if not isinstance(error, client_errors.ClientError):
        return None
    said, answer = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    headers = answer.get("HTTPHeaders", {})
    return Refused(
        int(answer.get("HTTPStatusCode") or 0),
        str(said.get("Code") or "no code"),
        str(said.get("Message") or ""),
        answer.get("RequestId") or headers.get("x-amz-request-id"),
        retry_after(headers.get("retry-after")),
    )
