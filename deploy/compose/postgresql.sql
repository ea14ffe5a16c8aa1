-- Run once, on an empty volume. For development: the password is public. createdb is for the tests, which make
-- databases of their own.
create role billing login createdb password 'billing';
create database billing owner billing;
