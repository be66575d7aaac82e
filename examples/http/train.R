#!/usr/bin/env Rscript
# Trains a network with a sign activation through HTTP, from R. It learns exclusive or: whether the two coordinates of a
# point have the same sign. The true gradient of Sign is zero, so nothing could be learned with it; the rule `ste_sign`
# passes the gradient on where the input is between -1 and 1.
#
#   gradrule serve --for development --http-port 8480
#   Rscript examples/http/train.R [http://localhost:8480]
library(httr2)
library(jsonlite)

arguments <- commandArgs()
folder <- dirname(sub("--file=", "", grep("--file=", arguments, value = TRUE)))
given <- commandArgs(trailingOnly = TRUE)
url <- if (length(given)) given[1] else "http://localhost:8480"

# Sends JSON and returns the answer. A problem is an R error with the server's message.
post <- function(path, body) {
  request(paste0(url, path)) |>
    req_body_raw(body, type = "application/json") |>
    req_error(body = function(answer) resp_body_json(answer)$detail) |>
    req_perform() |>
    resp_body_json(simplifyVector = TRUE)
}

program <- post("/v1/programs", readChar(file.path(folder, "network.json"), 1e6))$program$name

# toJSON writes a matrix as a list of its rows, as the server reads it; a vector stays a list of one dimension.
set.seed(1)
x <- as.matrix(expand.grid((0:7 - 3.5) / 4, (0:7 - 3.5) / 4, KEEP.OUT.ATTRS = FALSE))
dimnames(x) <- NULL
target <- matrix(ifelse(x[, 1] * x[, 2] > 0, 1, -1))
weights <- list(
  w1 = matrix(rnorm(32), 2), b1 = rnorm(16) / 2,
  w2 = matrix(rnorm(16) / 4, 16), b2 = 0
)

for (step in 1:150) {
  # I() keeps a vector of one element a list.
  feeds <- c(list(x = x, target = target), lapply(weights, I))
  answer <- post("/v1/evaluate", toJSON(list(program = unbox(program), feeds = feeds), digits = NA))
  for (name in names(weights)) {
    weights[[name]] <- weights[[name]] - 0.05 * answer$gradients[[name]]$values
  }
  if (step %in% c(1, 50, 100, 150)) {
    accuracy <- mean(answer$outputs$score$values * target > 0)
    cat(sprintf("step %d: loss %.3f, accuracy %.3f\n", step, answer$outputs$loss$values, accuracy))
  }
}
